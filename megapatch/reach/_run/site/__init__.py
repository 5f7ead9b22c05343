"""The folder that `megapatch run` puts first on PYTHONPATH. A package, so that a zip file has it as well."""
