"""Tables of measured operators: several runs joined into one, and what a table tells."""
