"""What a forward does with memory, told in words: runs in the truth child, and only text leaves it."""
