"""The openai engine: any endpoint that speaks the OpenAI API."""
