package schemas

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

type object = map[string]any

func schema(t *testing.T) object {
	t.Helper()
	var s object
	if err := json.Unmarshal(ReportSchema, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// tags are the JSON names of v's fields, and which of them are always written.
func tags(v any) (all, always []string) {
	for _, f := range reflect.VisibleFields(reflect.TypeOf(v)) {
		name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" { // is not written
			continue
		}
		all = append(all, name)
		if opts == "" {
			always = append(always, name)
		}
	}
	slices.Sort(all)
	slices.Sort(always)
	return all, always
}

func names(v any) []string {
	var all []string
	switch v := v.(type) {
	case object:
		for k := range v {
			all = append(all, k)
		}
	case []any:
		for _, k := range v {
			all = append(all, fmt.Sprint(k))
		}
	}
	slices.Sort(all)
	return all
}

// The schema speaks of the very fields that the code reads.
func TestSchemaHasTheFieldsOfTheCode(t *testing.T) {
	s := schema(t)
	defs := s["$defs"].(object)
	for _, c := range []struct {
		name   string
		schema any
		value  any
	}{{"report", s, Report{}}, {"usage", defs["usage"], Usage{}}, {"tokens", defs["tokens"], Tokens{}}, {"rejection", defs["rejection"], Rejection{}}} {
		o := c.schema.(object)
		all, always := tags(c.value)
		if got := names(o["properties"]); !slices.Equal(got, all) {
			t.Errorf("%s: properties are %v, fields are %v", c.name, got, all)
		}
		if got := names(o["required"]); !slices.Equal(got, always) {
			t.Errorf("%s: required are %v, always written are %v", c.name, got, always)
		}
		if o["additionalProperties"] != false {
			t.Errorf("%s: additionalProperties is %v, want false: the decoder is strict", c.name, o["additionalProperties"])
		}
	}
	for name, want := range map[string]uint64{"count": MaxCount, "requests": MaxReportRequests, "cost": MaxReportCost} {
		if got := defs[name].(object)["maximum"].(float64); uint64(got) != want {
			t.Errorf("largest %s is %v, want %d", name, got, want)
		}
	}
	if said := s["properties"].(object)["usage"].(object)["description"].(string); !strings.Contains(said, fmt.Sprint(uint64(MaxReportRequests))) || !strings.Contains(said, fmt.Sprint(uint64(MaxReportCost))) {
		t.Errorf("usage is described as %q, want the bounds of its sums in it", said)
	}
	if got := s["properties"].(object)["seq"].(object)["maximum"].(float64); uint64(got) != MaxCount {
		t.Errorf("largest seq is %v, want %d", got, uint64(MaxCount))
	}
	if got := defs["text"].(object)["maxLength"].(float64); got != MaxTextBytes {
		t.Errorf("longest text is %v, want %d", got, MaxTextBytes)
	}
}

// valid checks v against the part of JSON Schema that ours uses, and fails on any other.
func valid(root, s object, v any, at string) error {
	for key, want := range s {
		var ok bool
		switch key {
		case "$schema", "$id", "title", "description", "$defs", "required", "additionalProperties":
			ok = true // the last two below
		case "$ref":
			name := strings.TrimPrefix(want.(string), "#/$defs/")
			if err := valid(root, root["$defs"].(object)[name].(object), v, at); err != nil {
				return err
			}
			ok = true
		case "type":
			switch v := v.(type) {
			case object:
				ok = want == "object"
			case []any:
				ok = want == "array"
			case string:
				ok = want == "string"
			case json.Number:
				ok = want == "integer" && !strings.ContainsAny(v.String(), ".eE")
			}
		case "properties":
			props := want.(object)
			o, _ := v.(object)
			for k, item := range o {
				p, known := props[k]
				if !known {
					return fmt.Errorf("%s.%s is unknown", at, k)
				}
				if err := valid(root, p.(object), item, at+"."+k); err != nil {
					return err
				}
			}
			for _, k := range names(s["required"]) {
				if _, there := o[k]; !there {
					return fmt.Errorf("%s.%s is missing", at, k)
				}
			}
			ok = true
		case "items":
			list, _ := v.([]any)
			for i, item := range list {
				if err := valid(root, want.(object), item, fmt.Sprintf("%s[%d]", at, i)); err != nil {
					return err
				}
			}
			ok = true
		case "minimum", "maximum":
			number, isNumber := v.(json.Number) // the order of keywords is that of a map: the type may not be checked yet
			n, err := number.Float64()
			ok = isNumber && err == nil && (key == "minimum" && n >= want.(float64) || key == "maximum" && n <= want.(float64))
		case "minLength", "maxLength":
			text, _ := v.(string)
			n := float64(utf8.RuneCountInString(text))
			ok = key == "minLength" && n >= want.(float64) || key == "maxLength" && n <= want.(float64)
		case "pattern":
			ok = regexp.MustCompile(want.(string)).MatchString(v.(string))
		case "enum":
			ok = slices.Contains(want.([]any), v)
		case "format":
			_, err := time.Parse(time.RFC3339Nano, v.(string))
			ok = err == nil
		default:
			return fmt.Errorf("%s: the test does not know %q", at, key)
		}
		if !ok {
			return fmt.Errorf("%s: %v is not of %s %v", at, v, key, want)
		}
	}
	return nil
}

// What the schema takes is what the code takes.
func TestSchemaAndDecoderAgree(t *testing.T) {
	s := schema(t)
	fixture, err := os.ReadFile("testdata/v1/report.json")
	if err != nil {
		t.Fatal(err)
	}
	usage := func(s string) string {
		return `{"boot":"b","seq":1,"usage":[{"ts":"2026-11-29T10:00:00Z","tenant":"a","route":"r"` + s + `}]}`
	}
	for _, c := range []struct {
		body string
		ok   bool
	}{
		{smallest, true},
		{string(fixture), true},
		{usage(``), true},
		{usage(`,"allowed":10000000000`), true},
		{usage(`,"allowed":10000000001`), false},
		{usage(`,"rule":"x","rejected":10000000001`), false},
		{usage(`,"allowed":1,"cost":100000000000`), true},
		{usage(`,"allowed":1,"cost":100000000001`), false},
		{usage(`,"allowed":-1`), false},
		{usage(`,"allowed":1.5`), false},
		{usage(`,"allowed":"1"`), false},
		{usage(`,"allow":1`), false},
		{usage(`,"rule":"` + strings.Repeat("x", 257) + `"`), false},
		{usage(`,"rule":"a\u0000b"`), false},
		{usage(`,"rule":"a\u009b"`), false},
		{`{"boot":"b"}`, false},
		{`{"boot":"b","seq":0}`, false},
		{`{"boot":"a.b","seq":1}`, false},
		{`{"boot":"b","seq":1,"usage":[{"ts":"yesterday","tenant":"a","route":"r"}]}`, false},
		{`{"boot":"b","seq":1,"tokens":[{"rule":"","key":"","rate_nanos":-2,"capacity":0,"limit_rate_nanos":0,"limit_burst":0,"cum":0,"tokens_min":0,"tokens_last":0,"window_ns":0}]}`, false},
		{`{"boot":"b","seq":1,"tokens":[{"rule":"r","key":"","mode":"shadow","rate_nanos":-1,"capacity":0,"limit_rate_nanos":0,"limit_burst":0,"cum":0,"tokens_min":-9,"tokens_last":0,"window_ns":0}]}`, true},
		{`[]`, false},
	} {
		d := json.NewDecoder(strings.NewReader(c.body))
		d.UseNumber()
		var v any
		if err := d.Decode(&v); err != nil {
			t.Fatal(err)
		}
		if err := valid(s, s, v, "report"); (err == nil) != c.ok {
			t.Errorf("schema says %v of %.200s", err, c.body)
		}
		if _, err := DecodeReport(subject, ContentJSON, []byte(c.body), arrived); (err == nil) != c.ok {
			t.Errorf("decoder says %v of %.200s", err, c.body)
		}
	}
}

// The AsyncAPI page has every subject of the code, its references lead somewhere, and its example can be read.
func TestAsyncAPIHasEverySubject(t *testing.T) {
	raw, err := os.ReadFile("asyncapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var doc object
	if err := yaml.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	if doc["asyncapi"] != "3.0.0" {
		t.Errorf("asyncapi is %v", doc["asyncapi"])
	}
	want := map[string]bool{UsagePrefix + "{gateway}": true, ThrottlePrefix + "{gateway}": true, SnapshotPrefix + "{gateway}": true, HeartbeatPrefix + "{gateway}": true, StrictPrefix + "{gateway}": true,
		HealthPrefix + "{part}": true, ClockSubject: true, AlertPrefix + "{severity}": true, DeadPrefix + "{reason}": true,
		"$KV." + StoredBucket + "." + StoredPrefix + "{gateway}": true, "$KV." + StoredBucket + "." + FloorKey: true,
		"$KV.weir-history.{consumer}": true, "$KV.weir-history.leader": true, "$KV.weir-policy.{key}": true, "$KV.weir-switches.{key}": true}
	for name, c := range doc["channels"].(object) {
		address := c.(object)["address"].(string)
		if !want[address] {
			t.Errorf("channel %s is at %s, which the code does not know", name, address)
		}
		delete(want, address)
	}
	if len(want) > 0 {
		t.Errorf("no channel for %v", want)
	}
	dead := doc["channels"].(object)["dead"].(object)["parameters"].(object)["reason"].(object)["enum"]
	if got := names(dead); !slices.Equal(got, []string{ReasonGateway, ReasonInvalid, ReasonMalformed, ReasonRefused, ReasonSize, ReasonSubject, ReasonTime}) {
		t.Errorf("reasons are %v", got)
	}
	alert := doc["components"].(object)["messages"].(object)["alert"].(object)["payload"].(object)
	all, always := tags(Alert{})
	if got := names(alert["properties"]); !slices.Equal(got, all) {
		t.Errorf("alert has %v, the code %v", got, all)
	}
	if got := names(alert["required"]); !slices.Equal(got, always) {
		t.Errorf("alert requires %v, the code writes %v", got, always)
	}
	for name, v := range map[string]any{"stored": Stored{}, "floor": Floor{}} {
		all, _ := tags(v)
		if got := names(doc["components"].(object)["messages"].(object)[name].(object)["payload"].(object)["properties"]); !slices.Equal(got, all) {
			t.Errorf("%s has %v, the code %v", name, got, all)
		}
	}
	var walk func(v any, at string)
	walk = func(v any, at string) {
		switch v := v.(type) {
		case object:
			for k, item := range v {
				if ref, ok := item.(string); ok && k == "$ref" {
					path, inside := strings.CutPrefix(ref, "#/")
					if !inside {
						if _, err := os.Stat(ref); err != nil {
							t.Errorf("%s: %v", at, err)
						}
						continue
					}
					var to any = doc
					for _, step := range strings.Split(path, "/") {
						o, _ := to.(object)
						to = o[step]
					}
					if to == nil {
						t.Errorf("%s: %s leads nowhere", at, ref)
					}
					continue
				}
				walk(item, at+"/"+k)
			}
		case []any:
			for i, item := range v {
				walk(item, fmt.Sprintf("%s/%d", at, i))
			}
		}
	}
	walk(doc, "")
	example := doc["components"].(object)["messages"].(object)["reportJSON"].(object)["examples"].([]any)[0].(object)["payload"]
	body, err := json.Marshal(example)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := DecodeReport(subject, ContentJSON, body, arrived); err != nil || r.Requests() != 43 {
		t.Errorf("the example is %+v, %v", r, err)
	}
}
