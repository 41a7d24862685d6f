"""The forward with split keys, for few query rows."""
