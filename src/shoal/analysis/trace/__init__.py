"""Shows a schedule step by step."""
