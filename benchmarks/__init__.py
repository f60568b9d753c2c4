"""The evidence for every performance claim."""
