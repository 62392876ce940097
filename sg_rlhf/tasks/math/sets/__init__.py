"""The mathematics data sets."""
