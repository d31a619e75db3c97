#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use super::*;
use proptest::prelude::*;

/// What a reader of the whole output would say: where it ends, and with which stop string.
fn end(raw: &[u8], stops: &[&str]) -> (usize, Option<usize>) {
    for length in 1..=raw.len() {
        let complete = (0..stops.len()).filter(|index| raw[..length].ends_with(stops[*index].as_bytes()));
        if let Some(longest) = complete.rev().max_by_key(|index| stops[*index].len()) {
            return (length - stops[longest].len(), Some(longest));
        }
    }
    (raw.len(), None)
}

/// What may be shown of an output that goes on: all but the longest suffix that begins a stop string, and but an unfinished character.
fn showable(raw: &[u8], stops: &[&str]) -> String {
    let prefix = |stop: &&str| (0..stop.len()).rev().find(|n| raw.ends_with(&stop.as_bytes()[..*n])).unwrap_or(0);
    let held = stops.iter().map(prefix).max().unwrap_or(0);
    let shown = &raw[..raw.len() - held];
    let unfinished = match str::from_utf8(&shown[shown.len() - shown.utf8_chunks().last().map_or(0, |c| c.invalid().len())..]) {
        Err(error) if held == 0 && error.error_len().is_none() => shown.utf8_chunks().last().map_or(0, |c| c.invalid().len()),
        _ => 0,
    };
    String::from_utf8_lossy(&shown[..shown.len() - unfinished]).into_owned()
}

/// Pushes tokens and holds every invariant on the way.
fn check(tokens: &[&[u8]], stops: &[&str]) {
    let raw = tokens.concat();
    let (cut, stop) = end(&raw, stops);
    let mut text = Text::new(Arc::new(Stops::new(stops).unwrap()));
    let (mut shown, mut visible, mut found, mut pushed) = (String::new(), 0, None, 0);
    for (index, token) in tokens.iter().enumerate() {
        let piece = text.push(token);
        pushed += token.len();
        shown += &piece.text;
        visible += piece.visible;
        found = found.or(piece.stop);
        assert_eq!(visible + text.trimmed() + text.waiting(), index + 1);
        if !text.stopped() {
            assert_eq!(shown, showable(&raw[..pushed], stops), "{tokens:?} {stops:?}");
        }
    }
    let last = text.finish();
    assert_eq!(last.stop, None);
    shown += &last.text;
    visible += last.visible;
    assert_eq!(shown, String::from_utf8_lossy(&raw[..cut]), "{tokens:?} {stops:?}");
    assert_eq!(found, stop);
    let mut start = 0;
    let first_trimmed = tokens.iter().position(|token| {
        let matched = stop.map_or(0, |stop| stops[stop].len());
        let trimmed = stop.is_some() && (if token.is_empty() { start >= cut + matched } else { start >= cut });
        start += token.len();
        trimmed
    });
    assert_eq!(visible, first_trimmed.unwrap_or(tokens.len()), "{tokens:?} {stops:?}");
    assert_eq!(text.trimmed(), tokens.len() - visible);
    assert_eq!((text.waiting(), text.finish()), (0, Piece::default()));
}

fn check_every_split(raw: &[u8], stops: &[&str]) {
    for cuts in 0..1_u32 << (raw.len() - 1) {
        let mut tokens = Vec::new();
        let mut from = 0;
        for at in 1..raw.len() {
            if cuts >> (at - 1) & 1 == 1 {
                tokens.push(&raw[from..at]);
                from = at;
            }
        }
        tokens.push(&raw[from..]);
        check(&tokens, stops);
    }
}

#[test]
fn every_split_of_multi_byte_text_gives_the_whole_text() {
    check_every_split("한é😀 a".as_bytes(), &[]);
    check_every_split("naïve — é".as_bytes(), &["é!"]);
}

#[test]
fn every_split_finds_a_stop_that_starts_inside_a_token() {
    check_every_split("ab중END후cd".as_bytes(), &["END"]);
    check_every_split("xx일본END".as_bytes(), &["본E", "END"]);
    check_every_split(b"aabaabaaab..", &["aabaaab", "aaab"]);
}

#[test]
fn every_split_of_broken_bytes_gives_the_lossy_text() {
    check_every_split(b"\xe4\xb8a\xff\xf0\x9f\x98b\xc3", &["ab"]);
    check_every_split(b"\xf0\x9f\x98\x80\x80\xed\xa0\x80z", &["z"]);
}

#[test]
fn an_output_that_ends_inside_a_character_gets_one_replacement_character() {
    let mut text = Text::new(Arc::default());
    assert_eq!(text.push(b"a\xf0\x9f\x98").text, "a");
    assert_eq!(text.finish().text, "\u{fffd}");
    let mut text = Text::new(Arc::default());
    assert_eq!(text.push("a😀".as_bytes()).text, "a😀");
    assert_eq!(text.finish().text, "");
}

#[test]
fn only_the_beginning_of_a_stop_string_is_held_back() {
    let mut text = Text::new(Arc::new(Stops::new(&["</s>"]).unwrap()));
    assert_eq!(text.push(b"x <").text, "x ");
    assert_eq!(text.push(b"/").text, "");
    assert_eq!(text.push(b"b> <").text, "</b> ");
    assert_eq!(text.push(b"/s").text, "");
    let piece = text.push(b"> more");
    assert_eq!((piece.text.as_str(), piece.stop), ("", Some(0)));
    assert_eq!(text.push(b"after"), Piece::default());
    assert_eq!(text.finish().text, "");
    // The third token holds "b> " and is visible; the two that end the stop string and the one after it are not.
    assert_eq!((text.trimmed(), text.waiting()), (3, 0));
}

#[test]
fn the_match_that_completes_first_wins_and_of_these_the_longest() {
    let stopped = |raw: &[u8], stops: &[&str]| {
        let mut text = Text::new(Arc::new(Stops::new(stops).unwrap()));
        let piece = text.push(raw);
        (piece.text, piece.stop)
    };
    assert_eq!(stopped(b"xabcd", &["abcd", "bc"]), ("xa".into(), Some(1)));
    assert_eq!(stopped(b"xabc", &["bc", "abc", "c"]), ("x".into(), Some(1)));
}

#[test]
fn a_token_without_bytes_is_visible_up_to_the_first_trimmed_token() {
    check(&[b"a", b"", b"\n", b"", b"\n"], &["\n\n"]);
    check(&[b"", b"a", b""], &["zz"]);
}

#[test]
fn bad_stop_strings_are_refused_by_name() {
    assert_eq!(Stops::new(&["x", ""]), Err(StopError::Empty { index: 1 }));
    assert_eq!(Stops::new(&vec!["x"; MAX_STOP_STRINGS + 1]), Err(StopError::TooMany { count: MAX_STOP_STRINGS + 1 }));
    let long = "é".repeat(MAX_STOP_BYTES / 2) + "x";
    assert_eq!(Stops::new(&[&long]), Err(StopError::TooLong { index: 0, bytes: MAX_STOP_BYTES + 1 }));
    let error = kvasir_core::Error::from(StopError::Empty { index: 1 });
    assert_eq!(
        (error.reason.http_status(), error.field.as_deref(), error.message.as_str()),
        (400, Some("stop"), "stop[1] is empty; leave it out")
    );
    assert!(Stops::new(&["é".repeat(1000)]).is_ok());
}

fn fragment() -> impl Strategy<Value = Vec<u8>> {
    prop::sample::select(vec![
        b"a".to_vec(),
        b"b".to_vec(),
        b"ab".to_vec(),
        "é".as_bytes().to_vec(),
        b"\xc3".to_vec(),
        b"\xa9".to_vec(),
        "한".as_bytes().to_vec(),
        b"\xed\x95".to_vec(),
        "😀".as_bytes().to_vec(),
        b"\xf0\x9f".to_vec(),
        b"\xff".to_vec(),
        b"".to_vec(),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn any_split_of_any_bytes_with_any_stops_is_the_whole_text(
        tokens in prop::collection::vec(prop::collection::vec(fragment(), 0..4).prop_map(|parts| parts.concat()), 1..14),
        stops in prop::collection::vec("[abé한😀]{1,4}", 0..4),
    ) {
        let tokens: Vec<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
        check(&tokens, &stops.iter().map(String::as_str).collect::<Vec<_>>());
    }
}
