// A node's way through the passes, backwards to the export and forwards to the finished graph.

// The nodes that those a rewrite made stand for; all that it took out, where that is not known.
const sourcesOf = (hunk, made) => {
  const known = made.flatMap((name) => (name in hunk.of ? hunk.of[name] : []));
  if (known.length) return [...new Set(known)];
  return Object.keys(hunk.of).length ? [] : hunk.removed;
};

// Steps, latest first: {stage, region, names: what the node was before, now, hunk}. Each is a rewrite
// that made one of the names followed.
const ancestry = (stage, region, name) => {
  const steps = [];
  let names = [name];
  while (stage > 0 && names.length) {
    const change = changeOf(stage, region);
    if (change) {
      const made = names.filter((one) => change.made.has(one));
      const hunks = new Set(made.map((one) => change.hunkOf("after", one)));
      const from = [...hunks].flatMap((index) =>
        index === undefined ? [] : sourcesOf(change.hunks[index], made));
      const kept = names.map((one) => change.backward(one)).filter((one) => one !== null);
      for (const index of hunks) {
        if (index === undefined) continue;
        const hunk = change.hunks[index];
        const now = made.filter((one) => change.hunkOf("after", one) === index);
        steps.push({ stage, region, names: sourcesOf(hunk, now), now, hunk, index });
      }
      names = [...new Set([...kept, ...from])];
      region = change.from;
    }
    stage -= 1;
  }
  return { steps, roots: names };
};

// The first pass after a stage that takes a node out or changes what it takes, for each region that
// its own becomes; {stage, region, hunk, index, gone}.
const fate = (stage, region, name) => {
  const found = [];
  const follow = (at, where, one) => {
    while (at + 1 < STAGES.length) {
      const next = regionsAfter(at, where);
      if (next.length > 1) {
        for (const each of next) {
          const change = changeOf(at + 1, each);
          if (change && change.removed.has(one)) {
            found.push({ stage: at + 1, region: each, index: change.hunkOf("before", one) });
          } else follow(at + 1, each, change ? change.forward(one) : one);
        }
        return;
      }
      if (!next.length) return;
      const change = changeOf(at + 1, next[0]);
      if (change && change.removed.has(one)) {
        found.push({ stage: at + 1, region: next[0], index: change.hunkOf("before", one) });
        return;
      }
      if (change) one = change.forward(one);
      where = next[0];
      at += 1;
    }
    const names = DATA.names[where] || {};
    found.push({ stage: at, region: where, final: names[one] || one });
  };
  follow(stage, region, name);
  return found;
};
