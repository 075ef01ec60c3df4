package aggregatortest_test

import (
	"testing"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/aggregatortest"
)

func TestMemory(t *testing.T) {
	aggregatortest.Counter(t, func(*testing.T) aggregator.Counter { return aggregatortest.NewMemory() })
}
