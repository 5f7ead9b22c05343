"""What users start: each job runs to its end, plain, in processes that never import megapatch, and with it."""
