"""Pages, plots, statements and progress: everything that people read."""
