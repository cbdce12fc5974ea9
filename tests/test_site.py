"""What the site shows beside the guides: notebooks that run, a reference that is complete, pictures that are made."""

import inspect
import re
from pathlib import Path

import nbformat
import pytest

import netkin as nk
from docs import gallery, site_pages

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("path", site_pages.NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:.*zmq|.*event loop:Warning")
def test_a_notebook_runs_and_its_page_shows_what_it_gives(path):
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are made while the site is built"
    page = site_pages.notebook_page(path.read_text())
    assert page.startswith("# ")
    assert "```text\n" in page
    assert "Traceback" not in page
    assert 'class="notebook-output"' in page or path.stem == "which-model-to-start-from"


def test_there_are_three_notebooks():
    assert len(site_pages.NOTEBOOKS) == 3


def test_outputs_become_html_pictures_or_text():
    output = nbformat.v4.new_output
    html = output("display_data", {"text/html": "<b>x</b>", "text/plain": "x"})
    assert site_pages.output_part(html) == '<div class="notebook-output">\n<b>x</b>\n</div>'
    picture = output("execute_result", {"image/png": "AAAA\n", "text/plain": "<Figure>"})
    assert 'src="data:image/png;base64,AAAA"' in site_pages.output_part(picture)
    assert site_pages.output_part(output("execute_result", {"text/plain": "3"})) == "```text\n3\n```"
    assert site_pages.output_part(output("stream", name="stderr", text="progress")) == ""


def test_the_reference_has_an_entry_for_every_public_name():
    pages = "".join(site_pages.api_pages().values())
    headed = set(re.findall(r"heading: nk\.(\w+)", pages))
    described = {name for name in nk._HOME if not inspect.ismodule(getattr(nk, name))}
    assert described - headed == set()
    paths = re.findall(r"^::: (\S+)", pages, re.M)
    assert len(paths) == len(set(paths))


def test_the_name_that_most_people_look_for_begins_its_page():
    begins = [next(iter(site_pages.public_names(module))) for module in site_pages.room_modules()]
    assert begins[0] == "nk.compare"
    assert set(site_pages.FIRST) <= set(begins)


def test_names_that_rooms_hand_out_have_entries_too():
    pages = site_pages.api_pages()
    assert "netkin.integrations.lightning.dynamics_callback" in pages["integrations.md"]
    assert "heading: netkin.jobs.list_jobs" in pages["jobs.md"]
    assert "heading: netkin.errors.ShapeError" in pages["errors.md"]
    assert "_Hooks" not in pages["integrations.md"]


def test_every_picture_is_made_by_the_script_and_shown_somewhere():
    kept = {path.name for path in gallery.FIGURES.iterdir()}
    made = {f"{name}-{scheme}.png" for name in gallery.STUDIES for scheme in ("light", "dark")}
    made |= {f"figure-{name}.png" for name in gallery.FIGURE_NAMES}
    assert kept == made
    texts = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert {name for name in kept if f"figures/{name}" not in texts} == set()


def test_all_pictures_together_are_small():
    assert sum(path.stat().st_size for path in gallery.FIGURES.iterdir()) < 1.5e6


def test_the_gallery_links_to_the_page_of_every_study():
    linked = set(re.findall(r'href="pages/([\w-]+)\.html"', (DOCS / "gallery.md").read_text()))
    assert linked == set(gallery.STUDIES)


@pytest.mark.slow
def test_a_study_becomes_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "PAGES", tmp_path)
    gallery.write_page("tasks")
    assert "<html" in (tmp_path / "tasks.html").read_text()


def test_the_site_loads_no_fonts_from_elsewhere():
    settings = (DOCS.parent / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "https://" not in settings
