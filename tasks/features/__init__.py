"""Networks and preprocessing that turn raw arrays into features; one file per extractor."""
