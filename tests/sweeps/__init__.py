"""Sweeps, as SQLite does them: crashes at every file operation, damage to every file, odd inputs (docs/sweeps.md)."""
