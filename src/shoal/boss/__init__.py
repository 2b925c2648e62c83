"""One script drives a model that lives on other machines: the boss, and its workers."""
