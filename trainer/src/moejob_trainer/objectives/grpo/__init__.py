"""Group relative policy optimization: rewards of a group's answers become a loss of their tokens."""
