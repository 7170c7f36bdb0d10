"""The CustomResourceDefinition, made from the models and the rules; knows nothing of reading jobs."""
