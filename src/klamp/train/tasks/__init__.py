"""Tasks: where prompts come from, and what a right answer is."""
