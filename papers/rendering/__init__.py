"""The pages of papers/, rendered from result files: tables, figures, verdicts on claims, cost and what is missing."""
