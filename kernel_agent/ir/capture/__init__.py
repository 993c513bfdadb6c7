"""One call of a stub without a GPU: what it asks of the device, what it launches, what torch does in between."""
