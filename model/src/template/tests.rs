//! Renderings against Jinja2's, and limits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use serde_json::json;

use super::*;

fn specials() -> SpecialTexts {
    SpecialTexts { bos: "<s>".to_owned(), eos: "</s>".to_owned() }
}

fn render(source: &str, messages: &[Json]) -> Result<String, TemplateError> {
    let input = ChatInput { messages, tools: None, add_generation_prompt: true, extra: None };
    ChatTemplate::new(source).unwrap().render(&input, &specials(), &Unguarded)
}

fn user(content: &str) -> Json {
    json!({"role": "user", "content": content})
}

#[test]
fn renderings_equal_those_of_jinja2() {
    let golden: Json = serde_json::from_slice(include_bytes!("../../tests/golden/templates.json")).unwrap();
    let mut compared = 0;
    for case in golden["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let Some(source) = golden["templates"][name].as_str() else { continue };
        let conversation = case["conversation"].as_str().unwrap();
        let input = ChatInput {
            messages: golden["conversations"][conversation].as_array().unwrap(),
            tools: Some(&golden["tools"]),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            extra: None,
        };
        let rendered = ChatTemplate::new(source).unwrap().render(&input, &specials(), &Unguarded);
        match (case["text"].as_str(), case["raised"].as_str()) {
            (Some(text), _) => assert_eq!(rendered.unwrap(), text, "{name} on {conversation}"),
            (None, Some(message)) => {
                let error = rendered.unwrap_err();
                assert!(
                    matches!(&error, TemplateError::Raised(raised) if raised == message),
                    "{name} on {conversation}: {error}"
                );
            }
            (None, None) => assert!(matches!(rendered, Err(TemplateError::Failed(_))), "{name} on {conversation}"),
        }
        compared += 1;
    }
    assert_eq!(compared, 42);
}

#[test]
fn what_a_template_raises_is_the_message_and_a_refusal() {
    let error = render("{{ raise_exception('no system turns please') }}", &[user("x")]).unwrap_err();
    assert_eq!(error.reason(), Reason::TemplateRefused);
    assert_eq!(error.reason().http_status(), 400);
    assert!(error.to_string().ends_with("no system turns please"));
}

#[test]
fn endless_templates_run_out_of_budget() {
    let nested =
        "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}{% endfor %}{% endfor %}{% endfor %}";
    let error = render(nested, &[user("x")]).unwrap_err();
    assert!(matches!(error, TemplateError::Budget(_)), "{error}");
    let recursive = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(render(recursive, &[user("x")]).is_err());
}

#[test]
fn broken_templates_are_refused_with_the_line() {
    let error = ChatTemplate::new("line one\n{% for x in %}").unwrap_err();
    assert_eq!(error.reason(), Reason::ModelFile);
    assert!(error.to_string().contains("line 2"), "{error}");
    assert!(matches!(ChatTemplate::new(&"x".repeat(MAX_TEMPLATE_BYTES + 1)), Err(TemplateError::TooLong { .. })));
}

#[test]
fn text_parts_are_joined_unless_the_template_reads_them() {
    let message = json!({"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]});
    let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
    assert!(!ChatTemplate::new(plain).unwrap().takes_parts());
    assert_eq!(render(plain, std::slice::from_ref(&message)).unwrap(), "one\ntwo");
    let parts = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}";
    assert!(ChatTemplate::new(parts).unwrap().takes_parts());
    assert_eq!(render(parts, &[message]).unwrap(), "(one)(two)");
}

#[test]
fn messages_of_no_known_shape_are_refused_by_index() {
    let refused = |message: Json| render("{{ messages[0].content }}", &[user("x"), message]).unwrap_err();
    assert_eq!(refused(json!("text")).reason(), Reason::InvalidArgument);
    assert!(refused(json!("text")).to_string().contains("messages[1]: is not an object"));
    let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]});
    assert!(refused(image).to_string().contains("messages[1]: content[0] has type \"image_url\""));
    let mut deep = json!("x");
    for _ in 0..=MAX_JSON_DEPTH {
        deep = json!([deep]);
    }
    assert!(refused(json!({"role": "user", "content": null, "tool_calls": deep})).to_string().contains("nested deeper"));
}

#[test]
fn the_date_follows_the_format_and_bad_formats_are_no_panic() {
    let year = render("{{ strftime_now('%Y') }}", &[user("x")]).unwrap();
    assert!(year.parse::<u32>().unwrap() >= 2026);
    assert!(render("{{ strftime_now('%Q%!') }}", &[user("x")]).is_err());
}

#[test]
fn extra_variables_reach_the_template_but_cannot_replace_messages() {
    let extra = json!({"enable_thinking": false, "messages": []});
    let messages = [user("x")];
    let input = ChatInput { messages: &messages, tools: None, add_generation_prompt: false, extra: extra.as_object() };
    let template = ChatTemplate::new("{{ enable_thinking }} {{ messages | length }}").unwrap();
    assert_eq!(template.render(&input, &specials(), &Unguarded).unwrap(), "False 1");
}
