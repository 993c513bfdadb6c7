"""What a call did, written down as steps that another process can carry out again without the code that was called."""
