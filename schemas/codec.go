package schemas

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/weirhq/weir/schemas/weirpb"
)

// Content types of a report.
const (
	ContentProtobuf = "application/x-protobuf"
	ContentJSON     = "application/json"
)

// EncodeReport returns r as protobuf. The gateway's name travels in the subject.
func EncodeReport(r *Report) ([]byte, error) {
	p := &weirpb.Report{
		Boot: r.Boot, Seq: r.Seq, PolicyVersion: r.PolicyVersion, SealedAtNs: unixNano(r.SealedAt),
		Usage:      make([]*weirpb.Usage, len(r.Usage)),
		Tokens:     make([]*weirpb.Tokens, len(r.Tokens)),
		Rejections: make([]*weirpb.Rejection, len(r.Rejections)),
	}
	for i := range r.Usage {
		u := &r.Usage[i]
		p.Usage[i] = &weirpb.Usage{TsNs: unixNano(u.Time), Tenant: u.Tenant, Route: u.Route, Rule: u.Rule, Layer: u.Layer,
			Allowed: u.Allowed, Rejected: u.Rejected, Cost: u.Cost}
	}
	for i := range r.Tokens {
		t := &r.Tokens[i]
		p.Tokens[i] = &weirpb.Tokens{Rule: t.Rule, Layer: t.Layer, Key: t.Key, Tenant: t.Tenant, Mode: t.Mode, RateNanos: t.RateNanos,
			Capacity: t.Capacity, LimitRateNanos: t.LimitRateNanos, LimitBurst: t.LimitBurst, Taken: t.Taken, Refused: t.Refused, Cum: t.Cum,
			Incarnation: t.Incarnation, TokensMin: t.TokensMin, TokensLast: t.TokensLast, WindowNs: int64(t.Window), Granted: t.Granted, Consistency: t.Consistency}
	}
	for i := range r.Rejections {
		j := &r.Rejections[i]
		p.Rejections[i] = &weirpb.Rejection{TsNs: unixNano(j.Time), Tenant: j.Tenant, Route: j.Route, Rule: j.Rule, Layer: j.Layer,
			Method: j.Method, Path: j.Path, Client: j.Client, RetryAfterMs: j.RetryAfterMS, Instance: j.Instance}
	}
	b, err := proto.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode report %d of boot %s: %w", r.Seq, r.Boot, err)
	}
	return b, nil
}

// DecodeReport reads and validates a report that arrived on subject at arrived (the stream's clock). Without a content
// type a body that starts with '{' is JSON. Entries come back normal: one outcome each, a cost always said. An error is
// always a *Refusal.
func DecodeReport(subject, contentType string, body []byte, arrived time.Time) (*Report, error) {
	gateway, err := Gateway(UsagePrefix, subject)
	if err != nil {
		return nil, &Refusal{Reason: ReasonSubject, Detail: err.Error()}
	}
	if len(body) > MaxReportBytes {
		return nil, &Refusal{Reason: ReasonSize, Detail: fmt.Sprintf("%d bytes, want at most %d", len(body), MaxReportBytes)}
	}
	if contentType == "" && bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")) {
		contentType = ContentJSON
	}
	var r *Report
	switch media, _, _ := strings.Cut(contentType, ";"); strings.TrimSpace(media) {
	case ContentJSON:
		r, err = reportFromJSON(body)
	case ContentProtobuf, "":
		r, err = reportFromProto(body)
	default:
		return nil, &Refusal{Reason: ReasonMalformed, Field: "Content-Type", Detail: fmt.Sprintf("is %.80q, want %s or %s", contentType, ContentProtobuf, ContentJSON)}
	}
	if err != nil {
		return nil, &Refusal{Reason: ReasonMalformed, Detail: err.Error()}
	}
	if r.Gateway != "" && r.Gateway != gateway {
		return nil, &Refusal{Reason: ReasonGateway, Field: "gateway", Detail: fmt.Sprintf("is %.80q but the subject is of %q", r.Gateway, gateway)}
	}
	r.Gateway = gateway
	if err := r.Validate(arrived); err != nil {
		return nil, err
	}
	r.Usage = normal(r.Usage)
	return r, nil
}

// DecodeSealed reads what EncodeReport has written, as it is: for a gateway that kept its own report. The gateway's name
// is not in it.
func DecodeSealed(body []byte) (*Report, error) {
	r, err := reportFromProto(body)
	if err != nil {
		return nil, fmt.Errorf("decode report: %w", err)
	}
	return r, nil
}

// normal gives every entry one outcome and a cost. It changes in, and where no entry has both outcomes returns it.
func normal(in []Usage) []Usage {
	both := 0
	for i := range in {
		u := &in[i]
		if u.Cost == 0 {
			u.Cost = u.Allowed + u.Rejected
		}
		if u.Rejected == 0 {
			u.Rule, u.Layer = "", ""
		} else if u.Allowed > 0 {
			both++
		}
	}
	if both == 0 {
		return in
	}
	out := make([]Usage, 0, len(in)+both)
	for _, u := range in {
		if u.Allowed > 0 && u.Rejected > 0 {
			no := u
			no.Allowed, no.Cost = 0, part(u.Cost, u.Rejected, u.Allowed+u.Rejected)
			out = append(out, no)
			u.Rejected, u.Cost = 0, u.Cost-no.Cost
			u.Rule, u.Layer = "", ""
		}
		out = append(out, u)
	}
	return out
}

// part is floor(n·some/all), for some <= all.
func part(n, some, all uint64) uint64 {
	hi, lo := bits.Mul64(n, some)
	q, _ := bits.Div64(hi, lo, all)
	return q
}

func reportFromJSON(body []byte) (*Report, error) {
	// The decoder would put U+FFFD in place of what is not UTF-8, and so make one tenant of two.
	if !utf8.Valid(body) {
		return nil, errors.New("not valid UTF-8")
	}
	var r Report
	if err := decodeStrict(body, &r); err != nil {
		return nil, err
	}
	if err := noDuplicates(body); err != nil {
		return nil, err
	}
	return &r, nil
}

// noDuplicates refuses an object with the same key twice, of which the decoder would silently take the last. Keys are compared
// as the decoder does, without regard to case. body is valid JSON.
func noDuplicates(body []byte) error {
	d := json.NewDecoder(bytes.NewReader(body))
	type level struct {
		keys map[string]bool // nil in an array
		key  bool            // the next token is a key
	}
	levels := []level{{}}
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		at := &levels[len(levels)-1]
		switch {
		case token == json.Delim('}') || token == json.Delim(']'):
			levels = levels[:len(levels)-1]
			continue
		case at.key:
			name := strings.ToLower(token.(string))
			if at.keys[name] {
				return fmt.Errorf("%.40q is there twice", name)
			}
			at.keys[name], at.key = true, false
			continue
		}
		at.key = at.keys != nil // behind the value that begins here
		switch token {
		case json.Delim('{'):
			levels = append(levels, level{keys: map[string]bool{}, key: true})
		case json.Delim('['):
			levels = append(levels, level{})
		}
	}
}

func decodeStrict(body []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one JSON value")
	}
	return nil
}

func reportFromProto(body []byte) (*Report, error) {
	var p weirpb.Report
	if err := proto.Unmarshal(body, &p); err != nil {
		return nil, err
	}
	r := &Report{Boot: p.Boot, Seq: p.Seq, PolicyVersion: p.PolicyVersion, SealedAt: fromNano(p.SealedAtNs)}
	if n := len(p.Usage); n > 0 {
		r.Usage = make([]Usage, n)
	}
	for i, u := range p.Usage {
		r.Usage[i] = Usage{Time: fromNano(u.TsNs), Tenant: u.Tenant, Route: u.Route, Rule: u.Rule, Layer: u.Layer,
			Allowed: u.Allowed, Rejected: u.Rejected, Cost: u.Cost}
	}
	if n := len(p.Tokens); n > 0 {
		r.Tokens = make([]Tokens, n)
	}
	for i, t := range p.Tokens {
		r.Tokens[i] = Tokens{Rule: t.Rule, Layer: t.Layer, Key: t.Key, Tenant: t.Tenant, Mode: t.Mode, RateNanos: t.RateNanos,
			Capacity: t.Capacity, LimitRateNanos: t.LimitRateNanos, LimitBurst: t.LimitBurst, Taken: t.Taken, Refused: t.Refused, Cum: t.Cum,
			Incarnation: t.Incarnation, TokensMin: t.TokensMin, TokensLast: t.TokensLast, Window: time.Duration(t.WindowNs),
			Granted: t.Granted, Consistency: t.Consistency}
	}
	if n := len(p.Rejections); n > 0 {
		r.Rejections = make([]Rejection, n)
	}
	for i, j := range p.Rejections {
		r.Rejections[i] = Rejection{Time: fromNano(j.TsNs), Tenant: j.Tenant, Route: j.Route, Rule: j.Rule, Layer: j.Layer,
			Method: j.Method, Path: j.Path, Client: j.Client, RetryAfterMS: j.RetryAfterMs, Instance: j.Instance}
	}
	return r, nil
}

// EncodeThrottleUpdate returns u as protobuf.
func EncodeThrottleUpdate(u *ThrottleUpdate) ([]byte, error) {
	p := &weirpb.ThrottleUpdate{Gateways: uint32(u.Gateways), TtlMs: u.TTL.Milliseconds(), Snapshot: u.Snapshot, Epoch: u.Epoch, Frozen: u.Frozen, WeightPpm: uint32(u.Weight), Shares: make([]*weirpb.Share, len(u.Shares))}
	for i := range u.Shares {
		s := &u.Shares[i]
		p.Shares[i] = &weirpb.Share{Rule: s.Rule, Key: s.Key, Version: s.Version, RateNanos: s.RateNanos, Burst: s.Burst,
			LimitRateNanos: s.LimitRateNanos, LimitBurst: s.LimitBurst, Reason: s.Reason, Level: s.Level, Granted: s.Granted, Grant: s.Grant}
	}
	b, err := proto.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode throttle update: %w", err)
	}
	return b, nil
}

// DecodeThrottleUpdate reads a throttle update. It refuses values that no centre sends.
func DecodeThrottleUpdate(b []byte) (*ThrottleUpdate, error) {
	var p weirpb.ThrottleUpdate
	if err := proto.Unmarshal(b, &p); err != nil {
		return nil, fmt.Errorf("decode throttle update: %w", err)
	}
	if p.TtlMs <= 0 || p.Gateways == 0 {
		return nil, fmt.Errorf("decode throttle update: ttl %d ms and %d gateways, want both above 0", p.TtlMs, p.Gateways)
	}
	if p.WeightPpm > WholeWeight {
		return nil, fmt.Errorf("decode throttle update: a weight of %d millionths, want at most all of them", p.WeightPpm)
	}
	u := &ThrottleUpdate{Gateways: int(p.Gateways), TTL: time.Duration(p.TtlMs) * time.Millisecond, Snapshot: p.Snapshot, Epoch: p.Epoch, Frozen: p.Frozen, Weight: int(p.WeightPpm), Shares: make([]Share, len(p.Shares))}
	for i, s := range p.Shares {
		if s.RateNanos < 0 || s.Burst < 0 {
			return nil, fmt.Errorf("decode throttle update: share of %s %q is negative", s.Rule, s.Key)
		}
		u.Shares[i] = Share{Rule: s.Rule, Key: s.Key, Version: s.Version, RateNanos: s.RateNanos, Burst: s.Burst,
			LimitRateNanos: s.LimitRateNanos, LimitBurst: s.LimitBurst, Reason: s.Reason, Level: s.Level, Granted: s.Granted, Grant: s.Grant}
	}
	return u, nil
}

// EncodeTakeRequest returns q as protobuf.
func EncodeTakeRequest(q TakeRequest) ([]byte, error) {
	return proto.Marshal(&weirpb.TakeRequest{Rule: q.Rule, Key: q.Key, LimitRateNanos: q.LimitRateNanos, LimitBurst: q.LimitBurst, Cost: q.Cost})
}

// DecodeTakeRequest reads a request for tokens. It refuses values that no gateway sends.
func DecodeTakeRequest(b []byte) (TakeRequest, error) {
	var p weirpb.TakeRequest
	if err := proto.Unmarshal(b, &p); err != nil {
		return TakeRequest{}, fmt.Errorf("decode request for tokens: %w", err)
	}
	if p.Rule == "" || p.LimitRateNanos <= 0 || p.LimitBurst <= 0 || p.Cost == 0 {
		return TakeRequest{}, fmt.Errorf("decode request for tokens: %d of a limit of %d and %d, want a rule, a limit and a cost", p.Cost, p.LimitRateNanos, p.LimitBurst)
	}
	return TakeRequest{Rule: p.Rule, Key: p.Key, LimitRateNanos: p.LimitRateNanos, LimitBurst: p.LimitBurst, Cost: p.Cost}, nil
}

// EncodeTakeReply returns r as protobuf.
func EncodeTakeReply(r TakeReply) ([]byte, error) {
	return proto.Marshal(&weirpb.TakeReply{Allowed: r.Allowed, Remaining: r.Remaining, RetryInNs: int64(r.RetryIn)})
}

// DecodeTakeReply reads an answer.
func DecodeTakeReply(b []byte) (TakeReply, error) {
	var p weirpb.TakeReply
	if err := proto.Unmarshal(b, &p); err != nil {
		return TakeReply{}, fmt.Errorf("decode answer for tokens: %w", err)
	}
	return TakeReply{Allowed: p.Allowed, Remaining: p.Remaining, RetryIn: time.Duration(p.RetryInNs)}, nil
}

// EncodeHeartbeat returns h as protobuf.
func EncodeHeartbeat(h *Heartbeat) ([]byte, error) {
	b, err := proto.Marshal(&weirpb.Heartbeat{Boot: h.Boot, SentAtNs: unixNano(h.SentAt), PolicyVersion: h.PolicyVersion, Mode: h.Mode,
		ClockOffsetNs: int64(h.ClockOffset), ClockErrorNs: int64(h.ClockError), ClockKnown: h.ClockKnown, PendingReports: h.PendingReports, Version: h.Version,
		Without: h.Without, Sealed: h.Sealed, WeightPpm: uint32(min(max(h.Weight, 0), WholeWeight))})
	if err != nil {
		return nil, fmt.Errorf("encode heartbeat: %w", err)
	}
	return b, nil
}

// DecodeHeartbeat reads a heartbeat that came on subject.
func DecodeHeartbeat(subject string, b []byte) (*Heartbeat, error) {
	gateway, err := Gateway(HeartbeatPrefix, subject)
	if err != nil {
		return nil, fmt.Errorf("decode heartbeat: %w", err)
	}
	var p weirpb.Heartbeat
	if err := proto.Unmarshal(b, &p); err != nil {
		return nil, fmt.Errorf("decode heartbeat of %s: %w", gateway, err)
	}
	for _, name := range p.Without {
		if err := ValidName(name); err != nil {
			return nil, fmt.Errorf("decode heartbeat of %s: without: %w", gateway, err)
		}
	}
	if p.Sealed > MaxCount { // nobody has sealed so many
		return nil, fmt.Errorf("decode heartbeat of %s: sealed is %d, want at most %d", gateway, p.Sealed, uint64(MaxCount))
	}
	return &Heartbeat{Gateway: gateway, Boot: p.Boot, SentAt: fromNano(p.SentAtNs), PolicyVersion: p.PolicyVersion, Mode: p.Mode,
		ClockOffset: time.Duration(p.ClockOffsetNs), ClockError: time.Duration(p.ClockErrorNs), ClockKnown: p.ClockKnown,
		PendingReports: p.PendingReports, Version: p.Version, Without: p.Without, Sealed: p.Sealed, Weight: int(min(p.WeightPpm, WholeWeight))}, nil
}

// EncodeClockReply returns c as protobuf.
func EncodeClockReply(c ClockReply) ([]byte, error) {
	return proto.Marshal(&weirpb.ClockReply{ReceivedNs: unixNano(c.Received), SentNs: unixNano(c.Sent)})
}

// DecodeClockReply reads a clock reply.
func DecodeClockReply(b []byte) (ClockReply, error) {
	var p weirpb.ClockReply
	if err := proto.Unmarshal(b, &p); err != nil {
		return ClockReply{}, fmt.Errorf("decode clock reply: %w", err)
	}
	return ClockReply{Received: fromNano(p.ReceivedNs), Sent: fromNano(p.SentNs)}, nil
}

// EncodeAlert returns a as JSON.
func EncodeAlert(a *Alert) ([]byte, error) { return json.Marshal(a) }

// DecodeAlert reads an alert. Unknown fields are left for a newer alerter to understand.
func DecodeAlert(b []byte) (*Alert, error) {
	var a Alert
	if err := json.Unmarshal(b, &a); err != nil {
		return nil, fmt.Errorf("decode alert: %w", err)
	}
	if a.DedupKey == "" || (a.Type != AlertFiring && a.Type != AlertResolved) {
		return nil, fmt.Errorf("decode alert: type %.40q and dedup_key %.40q, want a known type and a key", a.Type, a.DedupKey)
	}
	return &a, nil
}

// unixNano keeps the zero time as 0 on the wire.
func unixNano(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromNano(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}
