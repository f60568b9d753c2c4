"""What is searched, and how one trial is measured."""
