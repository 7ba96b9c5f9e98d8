"""What stands between people's text and the engine's token ids: tokenizer, chat templates, detokenizer."""
