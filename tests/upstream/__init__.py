"""Upstream's own tests, without and with megapatch; and what the diagnoses say of upstream's branches."""
