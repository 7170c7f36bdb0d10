"""Converts weights between Hugging Face's files and our parameters. Knows neither Megatron nor the loop."""
