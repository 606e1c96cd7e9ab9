import re

from experiments.tasks import stories


def test_text_is_a_function_of_the_seed():
    assert stories.text(5000, seed=1) == stories.text(5000, seed=1) != stories.text(5000, seed=2)
    assert len(stories.text(5000, seed=1)) >= 5000


def test_every_word_is_listed_and_follows_a_space():
    text = stories.text(200_000, seed=0)
    assert set(re.findall("[A-Za-z]+", text)) <= set(stories.words())
    assert not re.search("[^ ][A-Za-z]+", re.sub(" [A-Za-z]+", "", text))


def test_the_hero_and_the_thing_recur():
    names = stories.BOYS + stories.GIRLS
    for story in stories.text(20_000, seed=4).splitlines():
        assert len({name for name in names if re.search(rf"\b{name}\b", story)}) in (1, 2), story
