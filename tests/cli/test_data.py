import json

from netkin.sources import load_data
from netkin.sources.datasets import CATALOGUE


def test_every_source_is_listed_with_the_place_it_is_looked_for(netkin):
    text = " ".join(netkin("data").stdout.split())
    assert len(CATALOGUE) > 5
    for source in CATALOGUE:
        for words in (source.name, source.what, source.where, f"example: --data {source.example}", source.options):
            assert " ".join(words.split()) in text


def test_the_list_is_there_for_programs_too(netkin):
    listed = json.loads(netkin("data --json").stdout)
    assert [set(source) for source in listed] == [{"name", "what", "where", "example", "options"}] * len(CATALOGUE)


def test_what_is_bundled_loads_from_its_example():
    example = next(source.example for source in CATALOGUE if source.name.startswith("digits"))
    assert load_data(example).examples > 0
