"""One module for each change, in the order of their numbers. Those released are never changed."""
