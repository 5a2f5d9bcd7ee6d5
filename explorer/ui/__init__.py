"""The page. With app.py the only place that imports gradio; one file a tab."""
