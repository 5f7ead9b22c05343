"""Everything is in setup.cfg, but for the commands that put the version into what is built."""

from setuptools import setup
from versioningit import get_cmdclasses

setup(cmdclass=get_cmdclasses())
