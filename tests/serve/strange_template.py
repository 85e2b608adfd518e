"""A chat template that fails, or does not end, for some messages."""

SOURCE = b"""
{%- set said = messages[0].content %}
{%- if said == "spin" %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{%- if said == "zero" %}{{ 1 // 0 }}{% endif %}
{%- if said == "long" %}{{ said * 10**9 }}{% endif %}
{%- if said == "half" %}{{ "\\ud800" }}{% endif %}
{{- said.format() }} answer:"""
