"""megapatch audit: the audit reports that the ranks of a run have left, as text, as JSON and as a page."""

EXIT_CODES = """\
exit codes:
  0  nothing was found on any rank; notes do not count
  1  there are findings
  2  could not look: bad usage, a folder without reports, or a page that cannot
     be written; or nothing was found, and a rank has left no report, or one
     that cannot be read
"""
