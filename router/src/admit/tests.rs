use super::*;
use futures::FutureExt as _;
use proptest::prelude::*;

fn ticket(priority: i32, tokens: u64) -> Ticket {
    Ticket { tenant: TenantTag("t".into()), priority, tokens }
}

fn gate(running_max: usize, queue_max: usize) -> Admission {
    Admission::new(AdmitSettings {
        running_max,
        queue_max,
        running_tokens_max: 100,
        queue_tokens_max: 100,
        ..AdmitSettings::default()
    })
}

#[tokio::test(start_paused = true)]
async fn beyond_the_limit_requests_wait_by_priority_then_arrival() {
    let gate = gate(1, 8);
    let first = gate.enter(&ticket(0, 1), None).await.unwrap();
    let (low, high) = (ticket(0, 1), ticket(5, 1));
    let mut early = Box::pin(gate.enter(&low, None));
    let mut urgent = Box::pin(gate.enter(&high, None));
    assert!(early.as_mut().now_or_never().is_none() && urgent.as_mut().now_or_never().is_none());
    assert_eq!((gate.running(), gate.waiting()), (1, 2));
    drop(first);
    let permit = urgent.as_mut().now_or_never().expect("the urgent one is let in").unwrap();
    assert!(early.as_mut().now_or_never().is_none());
    drop(permit);
    drop(early.await.unwrap());
    assert_eq!((gate.running(), gate.running_tokens(), gate.waiting()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_refuses_at_once_by_number_and_by_tokens() {
    let gate = gate(1, 1);
    let _running = gate.enter(&ticket(0, 1), None).await.unwrap();
    let big = ticket(0, 101);
    let error = gate.enter(&big, None).await.unwrap_err();
    assert_eq!((error.reason, error.retry_after.is_some()), (Reason::Overloaded, true));
    let small = ticket(0, 1);
    let mut waiting = Box::pin(gate.enter(&small, None));
    assert!(waiting.as_mut().now_or_never().is_none());
    assert_eq!(gate.enter(&small, None).await.unwrap_err().reason, Reason::Overloaded);
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_at_its_deadline_or_when_patience_does() {
    let gate = gate(1, 8);
    let _running = gate.enter(&ticket(0, 1), None).await.unwrap();
    let start = Instant::now();
    let error = gate.enter(&ticket(0, 1), Some(start + Duration::from_secs(2))).await.unwrap_err();
    assert_eq!((error.reason, start.elapsed().as_secs()), (Reason::DeadlineExceeded, 2));
    let error = gate.enter(&ticket(0, 1), None).await.unwrap_err();
    assert_eq!((error.reason, start.elapsed().as_secs()), (Reason::Overloaded, 32));
    assert_eq!(gate.waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_larger_than_the_limit_runs_alone() {
    let gate = gate(8, 8);
    let whale = gate.enter(&ticket(0, 5_000), None).await.unwrap();
    let small = ticket(0, 1);
    let mut next = Box::pin(gate.enter(&small, None));
    assert!(next.as_mut().now_or_never().is_none());
    drop(whale);
    assert!(next.await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn closing_refuses_those_that_wait_and_lets_the_running_finish() {
    let gate = gate(1, 8);
    let running = gate.enter(&ticket(0, 1), None).await.unwrap();
    let small = ticket(0, 1);
    let mut waiting = Box::pin(gate.enter(&small, None));
    assert!(waiting.as_mut().now_or_never().is_none());
    gate.close();
    assert_eq!(waiting.await.unwrap_err().reason, Reason::Draining);
    assert_eq!(gate.enter(&small, None).await.unwrap_err().reason, Reason::Draining);
    drop(running);
    assert_eq!((gate.running(), gate.waiting()), (0, 0));
    assert!(gate.enter(&small, None).await.is_ok(), "what there is room for is on its way already");
}

proptest! {
    #[test]
    fn limits_hold_and_every_place_comes_back_whatever_is_dropped_when(
        steps in prop::collection::vec((0u8..4, 0u64..60, -2i32..3, any::<prop::sample::Index>()), 0..150),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let gate = gate(3, 4);
            let tickets: Vec<Ticket> = steps.iter().map(|(_, tokens, priority, _)| ticket(*priority, *tokens)).collect();
            let mut waiting = Vec::new();
            let mut permits = Vec::new();
            for ((step, _, _, at), ticket) in steps.iter().zip(&tickets) {
                match step {
                    0 | 1 => waiting.push(Box::pin(gate.enter(ticket, None))),
                    2 if !permits.is_empty() => drop(permits.swap_remove(at.index(permits.len()))),
                    3 if !waiting.is_empty() => drop(waiting.swap_remove(at.index(waiting.len()))),
                    _ => {}
                }
                let mut index = 0;
                while index < waiting.len() {
                    match waiting[index].as_mut().now_or_never() {
                        None => index += 1,
                        Some(entered) => {
                            drop(waiting.swap_remove(index));
                            permits.extend(entered);
                        }
                    }
                }
                assert!(gate.running() <= 3 && gate.waiting() <= 4);
                assert!(gate.running_tokens() <= 100 || gate.running() == 1);
                assert_eq!((gate.running(), gate.waiting()), (permits.len(), waiting.len()));
                assert!(gate.waiting() == 0 || gate.running() > 0, "somebody waits though nobody runs");
            }
            drop(waiting);
            drop(permits);
            assert_eq!((gate.running(), gate.running_tokens(), gate.waiting()), (0, 0, 0));
        });
    }
}
