"""Language models behind one protocol: OpenAI, Anthropic, a person with files, a recorded run."""
