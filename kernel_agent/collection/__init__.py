"""The dataset as a collection: proving its pairs in bulk, keeping the verdicts as data, and keeping twins out."""
