"""megapatch verify: on the user's own machine, each defect without its patch, and the repair with it."""
