"""SQL over the tables of a results folder: `specsweep query`, and the questions of docs/tables.md."""
