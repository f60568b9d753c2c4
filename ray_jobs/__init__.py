"""What `ray job submit` runs."""
