package schemas

import (
	"reflect"
	"testing"
)

func TestHealth(t *testing.T) {
	h := &Health{Part: PartAggregator, Boot: "b1", Without: []string{"redis"}, Stopped: true}
	b, err := EncodeHealth(h)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := DecodeHealth(HealthPrefix+PartAggregator, b); err != nil || !reflect.DeepEqual(got, h) {
		t.Errorf("%s was read as %+v, %v", b, got, err)
	}
	for _, bad := range []string{``, `{}`, `{"boot":"a b"}`, `{"boot":"b","without":["a/b"]}`, `[]`} {
		if got, err := DecodeHealth(HealthPrefix+PartAggregator, []byte(bad)); err == nil {
			t.Errorf("%s was read as %+v", bad, got)
		}
	}
	if got, err := DecodeHealth(HealthPrefix+"a.b", b); err == nil {
		t.Errorf("a subject of two names was read as %+v", got)
	}
}
