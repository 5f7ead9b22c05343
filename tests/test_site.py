"""tests/check_site.py finds what is wrong with a built site."""

from __future__ import annotations

import check_site
import pytest

STYLED = '<link href="css/site.css?v=1" rel="stylesheet">'


@pytest.fixture
def site(tmp_path):
    (tmp_path / "css").mkdir()
    (tmp_path / "css" / "site.css").touch()
    (tmp_path / "other page").mkdir()
    (tmp_path / "other page" / "index.html").write_text(
        '<link href="../css/site.css"><h1 id="top">Other</h1><a name="old"></a><a href="..">up</a>'
    )

    def write(body):
        (tmp_path / "index.html").write_text(body)
        return list(check_site.problems(tmp_path.resolve()))

    return write


def test_a_good_site(site):
    targets = (
        "other%20page/",
        "other%20page/#top",
        "/other%20page/index.html#old",
        "#here",
        "https://a.b/c#d",
        "",
    )
    links = "".join(f'<a href="{target}">x</a>' for target in targets)
    assert site(f'{STYLED}<p id="here">{links}</p>') == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<p>plain</p>", "index.html is without css/site.css"),
        ('<a href="gone/">x</a>', "index.html links to gone/, which is not there"),
        ('<img src="gone.svg">', "index.html links to gone.svg, which is not there"),
        (
            '<a href="other%20page/#gone">x</a>',
            "index.html links to other%20page/#gone, and there is no such anchor",
        ),
        ('<a href="#gone">x</a>', "index.html links to #gone, and there is no such anchor"),
        ('<p id="a"></p><p id="a"></p>', "index.html has the anchor #a more than once"),
    ],
)
def test_what_is_wrong(site, body, problem):
    assert site((STYLED if "plain" not in body else "") + body) == [problem]


def test_an_empty_site(tmp_path):
    assert list(check_site.problems(tmp_path)) == [f"{tmp_path} has no pages"]
