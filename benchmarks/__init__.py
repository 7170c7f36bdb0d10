"""What is measured, and how. Every benchmark appends lines to results/ and its page is made from them."""
