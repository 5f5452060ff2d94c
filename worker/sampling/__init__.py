"""From logits and states to tokens and exits."""
