"""What models write around an answer: reasoning, and calls of tools. One file for each syntax."""
