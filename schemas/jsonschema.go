package schemas

import _ "embed"

// ReportSchema is the JSON Schema (2020-12) of a report in JSON, for gateways in other languages.
//
//go:embed jsonschema/report.json
var ReportSchema []byte
