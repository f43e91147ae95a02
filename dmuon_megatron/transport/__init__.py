"""How gradients reach the ranks that update, and how new weights come back."""
