"""Tables, ratios and plots of the results."""
