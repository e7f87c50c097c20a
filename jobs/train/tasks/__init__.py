"""What is trained: images, speech, text."""
