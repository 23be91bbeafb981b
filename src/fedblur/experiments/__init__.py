"""Many runs: tables, recipes, private search, audits."""
