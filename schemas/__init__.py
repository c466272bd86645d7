"""Tables, configurations, errors, and how the packages speak."""

from schemas.messages import show_messages

show_messages()
