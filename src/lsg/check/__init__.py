"""Do samples stay apart? A few records in, a refusal or where the samples are in every layer out."""
