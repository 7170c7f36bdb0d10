"""What training costs: run in the trainer environment."""
