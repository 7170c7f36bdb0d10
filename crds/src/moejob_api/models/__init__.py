"""Models as planning sees them: shapes read from config.json, and how many parameters they have."""
